"""Reading what servers, NCCL and Prometheus wrote, and saying what it means."""
