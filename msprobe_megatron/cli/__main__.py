"""``python -m msprobe_megatron.cli``."""

import sys

from msprobe_megatron.cli import main

sys.exit(main())
