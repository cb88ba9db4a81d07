"""Run measured processes: cases, servers, workers, meters."""
