"""What one visitor may ask of the server; held here, because a form's own limits do not bind API calls."""

MAX_PROMPT = 4000
MAX_PENDING = 2000
MAX_CLIPS_AT_ONCE = 16
MAX_IMAGE_PIXELS = 50_000_000
MAX_UPLOAD = 512 << 20
# Frames times pixels: 1920x1088 for 60 s at 50 frames a second.
MAX_CLIP_PIXELS = 1920 * 1088 * 3000
# Seconds that an upload nobody used is kept.
UPLOAD_AGE = 3600
