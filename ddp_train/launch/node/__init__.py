"""What runs on each machine of a run over several, and what they tell each other before torch starts. Imports no torch.

program      one machine's part: signals, what the registry says, its ending
arrival      how it comes to the registry, and comes back
round_agent  its agent for one round
registry     the service on the first machine: who is here, who is refused, who is lost
rounds       when all ranks start, start again and end; in the same process
work         what the machines do together
wire         the line between a machine and the registry
place        which machine this is, and where it finds the first one
early        stop signals that come before the program is there
facts        what a machine tells of itself
differences  what of it differs from the first machine
contents     what a path holds, told in a few kilobytes
source       the code that the ranks of a machine would run, file by file
interfaces   the network interfaces that gloo and NCCL are told to take
"""
