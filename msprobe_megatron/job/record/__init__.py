"""From slots on the device to files: the only room that writes files during training.

`slots` holds statistics on the device and `observations` what they belong to; `writer` runs the thread and its queue;
`step_files`, `monitor_files`, `check_files` and `tensors` are the batches that it writes, one module per kind of file.
"""
