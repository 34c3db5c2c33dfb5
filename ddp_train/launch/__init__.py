"""From a job to running processes: `local` on this machine, `machines` on several by hand, `submit` through an engine (`engine/`).

`node/` runs on each of several machines, `node_facts/` compares them, `agent/` is torchrun's. No torch is imported but in `agent/`, which
only the agent's process imports.
"""
