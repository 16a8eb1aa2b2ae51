"""`python -m trtpipe`."""

import sys

from trtpipe.cli.main import main

sys.exit(main())
