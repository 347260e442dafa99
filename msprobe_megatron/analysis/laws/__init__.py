"""Laws that every step of a healthy run obeys, checked on what one run recorded, without a golden run."""
