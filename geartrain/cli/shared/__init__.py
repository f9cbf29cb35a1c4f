"""What commands share: where settings come from, options that several take, how tables are printed."""
