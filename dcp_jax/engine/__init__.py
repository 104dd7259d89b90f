"""The host side of serving: requests, scheduler, launches, the loop over steps, the runner."""
