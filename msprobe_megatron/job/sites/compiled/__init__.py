"""The same hooks compiled: C++ sources, their loader, and the Python side of each."""
