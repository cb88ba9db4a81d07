"""Run the checkpoint workload of MLPerf Storage, by its own tool (DLIO), with this library as a back end."""
