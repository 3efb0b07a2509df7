"""From what is known of backbone, ranks, tasks and device to a plan (MuxTune sections 3.3 to 3.5).

Costs: `stage_cost` (equations 3 and 5: layers by `backbone_time`, adapters and `messages`), `cost` (of buckets and
pipelines). Search: `grouping` (equations 6 and 7), `arrangement`, `search`. Plans: `plan_evaluator`, `planner`.
"""
