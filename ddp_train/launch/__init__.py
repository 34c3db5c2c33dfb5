"""From a job to running processes. Imports no torch but in `agent/`, which only the agent's process imports.

job            what travels to the ranks of a run
launcher       what a launcher offers, and a slot of a sweep
walltime       when a run or a sweep has to stop for its time limit
local          this machine: one agent, for a job that is composed already
machines       several machines by hand
node/          what runs on each of several machines, and how they agree
node_facts/    what a machine tells of itself, and how machines are compared
agent_process  an agent as a child of this process, which imports while the command composes
fork_request   what a fork server is asked for: an agent, a rank or a check
submit         a job goes to an engine, and an engine as a slot of a sweep's scheduler
source_copy    a copy of the source that a run uses
spec           what an engine is given: one run, frozen
signals        what this process does with stop signals meanwhile
engine/        who starts processes on other machines
agent/         the agent itself: torchrun's own, with a better ending, and ranks that are forked
"""
