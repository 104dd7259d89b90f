"""The paged caches: device arrays (`pool`) and the host's page bookkeeping (`allocator`)."""
