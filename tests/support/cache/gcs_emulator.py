"""The emulator of Google's storage, a thread a connection: alone, one that is silent stops all."""

import http.server
import runpy

http.server.HTTPServer = http.server.ThreadingHTTPServer
runpy.run_module("gcp_storage_emulator", run_name="__main__")
