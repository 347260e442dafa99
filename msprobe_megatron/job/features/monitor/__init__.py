"""Section `monitor`: a few numbers of every step, for as long as the job runs."""
