"""States of models, optimizers and other parts: the checkpoint says what there is, the program where it belongs."""
