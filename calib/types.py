"""Types that many modules name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

#: A NumPy array of any dtype and shape.
Array = np.ndarray
#: A JSON object as Python parses it; its reader checks keys and values.
JsonObject = dict[str, Any]
#: The same, held by what does not change it.
JsonMapping = Mapping[str, Any]
