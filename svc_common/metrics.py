"""Serves a process's Prometheus metrics over HTTP, for services without an HTTP port."""

from prometheus_client import start_http_server

from svc_common.addresses import cannot_listen, check_can_listen


class MetricsServer:
    """`GET /metrics` of the default registry, from a daemon thread."""

    def __init__(self, host: str, port: int) -> None:
        self._server, self._thread = start_http_server(port, addr=host)
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stops serving and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(host: str, port: int) -> MetricsServer:
    """Serves metrics on a port, or on a free one where `port` is 0. Raises AddressInUse or CannotListen."""
    check_can_listen(host, port)
    try:
        return MetricsServer(host, port)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
