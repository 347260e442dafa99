"""The page: one self-contained HTML file made of a run, or of a run beside a golden one."""
