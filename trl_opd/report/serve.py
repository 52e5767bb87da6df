"""`trl-opd report RUN_DIR`: writes the page of a run anew or, with --watch, shows it while the run goes on."""

from __future__ import annotations

import argparse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from .data import records_path
from .page import render, write_page


def main(argv: list[str] | None = None) -> int:
    """Parses, writes or serves; returns 0.

    Raises:
        ValueError: If the folder holds no run.
    """
    parser = argparse.ArgumentParser(prog="trl-opd report", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="output_dir of a run")
    parser.add_argument("--watch", action="store_true", help="serve the page on this machine; it follows the run")
    parser.add_argument("--port", type=int, default=8765, help="of --watch; 0: any that is free")
    arguments = parser.parse_args(argv)
    print(f"wrote {write_page(arguments.run_dir)}", flush=True)
    if arguments.watch:
        watch(arguments.run_dir, arguments.port)
    return 0


def watch(run_dir: Path, port: int) -> None:
    """Serves the page on loopback until Ctrl-C."""
    with make_server(run_dir, port) as server:
        print(f"http://127.0.0.1:{server.server_address[1]} follows {run_dir}; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def make_server(run_dir: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server of `/`, the page as it would be now, and `/version`, which changes when that does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            version = version_of(run_dir)
            if self.path == "/version":
                self._answer("text/plain", version)
            elif self.path == "/":
                self._answer("text/html", render(run_dir, version))
            else:
                self.send_error(404)

        def _answer(self, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def version_of(run_dir: Path) -> str:
    """Of the records: one for each time that something was added."""
    path = records_path(run_dir)
    if not path.is_file():
        return "0"
    found = path.stat()
    return f"{found.st_mtime_ns}-{found.st_size}"
