"""Section `checks`: replicas and collectives compared by digest while the job runs."""
