"""Starts two replicas on Ray, as docs/replicas.md says, asks one question, and stops them."""

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.request

URL = "http://127.0.0.1:8437"
command = ["megakernel", "serve", "--replicas", "2", "--port", "8437", "--model", "smollm2-135m"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
try:
    body = json.dumps({"model": "smollm2-135m", "prompt": "One, two,", "max_tokens": 4}).encode()
    request = urllib.request.Request(f"{URL}/v1/completions", body, {"Content-Type": "application/json"})
    answer = b""
    for _ in range(180):
        if server.poll() is not None:
            sys.exit("the replicas ended before they answered")
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as response:
            answer = response.read()
            break
        time.sleep(1)
    print(answer.decode() or sys.exit("the replicas do not answer"))
    # Replicas answer a moment before the command is ready, and Ray may lose a signal that arrives in between.
    assert server.stdout is not None
    print(next(line for line in server.stdout if "--ray-address" in line))
finally:
    server.send_signal(signal.SIGINT)
    server.wait(60)
