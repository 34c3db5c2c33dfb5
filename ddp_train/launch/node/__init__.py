"""What runs on each machine of a run over several, and what they tell each other before torch starts. Imports no torch.

place        which machine this is, and where it finds the first one
facts        what a machine tells of itself
differences  what of it differs from the first machine
contents     what a path holds, told in a few kilobytes
source       the code that the ranks of a machine would run, file by file
interfaces   the network interfaces that gloo and NCCL are told to take
"""
