"""`ddp-train doctor`: are these machines fit for this run? A program that ranks call (`Job.program`), however they were started.

checkup      what the ranks do, together; the only one that needs torch
machine      what each machine finds out about itself and about its way to the others, and how long that may take
problems     what is wrong, each with its host and what to do
table        all of it on one screen, where the odd one out stands by itself
"""
