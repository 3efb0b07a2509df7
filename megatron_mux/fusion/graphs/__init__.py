"""The graph of a layer, and in which order its parts are launched (MuxTune section 3.4).

`layer_graph` traces a layer, `operators` predicts the seconds of its operators, `subgraphs` divides it at its messages,
`subgraph_picture` draws that. `launch_order` is Algorithm 1 on the parts of several hybrid tasks, and the simulation
that prices an order; `fusion.predicted_interleaving` shows it in a schedule.
"""
