"""``python -m msprobe_megatron``: the command line."""

import sys

from msprobe_megatron.cli import main

sys.exit(main())
