"""How a head's tree grows: policies, which know no head, the order of candidates, and many trees in step."""
