"""One read, one launch: the measuring kernel of accelerators, in Triton. Imported only where it is needed."""
