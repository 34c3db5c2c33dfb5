"""`ddp-train doctor`: are these machines fit for this run? Imports no torch; what needs it is in `rank/checkup.py`.

machine      what each machine finds out about itself, and about its way to the others
examined     all that was said, before it is judged
problems     what is wrong with them, each with its host and what to do
report       what came of it, for the command that asked when the machines are an engine's
table        all of it on one screen, where the odd one out stands by itself
"""
