"""`python -m trtpipe`."""

import sys

from trtpipe.cli import main

sys.exit(main())
