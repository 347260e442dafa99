"""One run alone: where non-finite values come from, anomalies, suspects, summary."""
