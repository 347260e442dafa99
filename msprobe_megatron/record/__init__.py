"""From slots on the device to files: the only room that writes files during training.

``slots`` receives figures, ``schema`` says what a row is, ``table`` puts rows and figures together,
``writer`` does so in its own thread, ``directory`` makes files appear whole or not at all.
"""
