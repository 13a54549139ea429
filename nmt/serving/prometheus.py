"""What the server counts, for Prometheus."""

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter("nmt_requests", "answered requests for a translation", ["status"])
SECONDS = Histogram("nmt_request_seconds", "seconds from a request for a translation to its answer")
LINES = Counter("nmt_lines", "translated lines")
SEARCH_LINES = Histogram("nmt_search_lines", "lines of a search", buckets=[2**n for n in range(16)])
WAITING = Gauge("nmt_waiting_requests", "requests that wait or are being translated")
