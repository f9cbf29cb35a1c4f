"""Where training images come from: rendered fonts, folders of images, and how both become equal-sized bitmaps."""
