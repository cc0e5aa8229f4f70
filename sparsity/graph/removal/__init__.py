"""Why a channel may go: proofs that removal and masking give the same result."""
