"""`python -m fuzz`."""

import sys

from fuzz.command import main

sys.exit(main())
