"""`python -m tp_residual`"""

import sys

from tp_residual.cli import main

sys.exit(main())
