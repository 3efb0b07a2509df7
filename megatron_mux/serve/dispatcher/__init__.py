"""Which job goes to which instance, and why the others wait: pure, without a clock, from the standard library alone.

view        what decisions are made from
decisions   what comes out
rates       how fast jobs train together
suspects    which jobs may have ended an instance
accounts    what tenants have been given
room        an instance while decisions are made
policies    who comes next: `Fifo`, `Fair`
decide      `plan` and `decide`
forecast    when jobs will probably begin and end
simulate    a service in simulated time, for tests and benchmarks
"""
