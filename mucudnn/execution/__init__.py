"""Running a division: one micro-batch after another, in one buffer; and filters that stay there."""
