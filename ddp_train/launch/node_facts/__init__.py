"""What a machine tells of itself before torch starts, and what of it differs from the first machine. Imports no torch.

facts        what a machine tells: `NodeFacts`
file_list    its data and its code, in a few kilobytes
differences  the comparison, as sentences
"""
