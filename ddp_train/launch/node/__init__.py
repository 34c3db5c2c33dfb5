"""What runs on each machine of a run over several, and how they join and agree. Imports no torch.

program          one machine's part: signals, what the registry says, its ending
this_node        which machine this is, where it finds the first one, and what it brings
registry_client  how it joins the run, and joins it again
attempt_agent    its agent for one attempt
registry         the service on the first machine: who is in the run, refusals, losses
attempts         when all ranks start, start again and end; in the same process
wire             the line between a machine and the registry
"""
