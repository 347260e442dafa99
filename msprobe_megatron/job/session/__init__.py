"""The life of one probed job: arming, attaching, the state machine of steps, faults, messages to the user."""
