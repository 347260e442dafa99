"""Section `recorder`: the last steps kept in memory and written when the job ends badly."""
