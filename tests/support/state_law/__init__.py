"""The law of states: a run that resumes from a checkpoint continues bit for bit, or the save was refused."""
