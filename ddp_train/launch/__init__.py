"""From a job to running processes. Imports no torch but in `agent/`, which only the agent's process imports.

`local` starts the agent of this machine (`agent_process`), `machines` the agents of several by hand, and `submit` gives a job to an engine.
engine/ starts processes on other machines, node/ is what each of them runs, and agent/ is torchrun's own agent with a better ending.
"""
