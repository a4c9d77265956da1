"""What `kvmem bench` and `kvmem demo` run: seeded histories, quality and speed."""
