"""Values as bytes and back: protobuf headers, and raw arrays beside them."""
