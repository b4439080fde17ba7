"""Making a drafter for a target: text of the target's own, training, the stored form, and acceptance before serving."""
