"""A child of a rank still runs when the rank ends: dashboards and uploaders started by subprocess.Popen."""

import subprocess
import sys

process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(25)", "uploader"])
print("started")
