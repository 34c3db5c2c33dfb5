"""`ddp-train doctor`: are these machines fit for this run? Ranks run it (`Program`), however they were started.

checkup      what the ranks do together; the only module that needs torch
machine      how a machine examines itself and the network to the others, and how long that may take
problems     what is wrong, with the host of each problem and the fix
table        the result on one screen: a line for each fact, and the machines that differ
"""
