//! A log on modelled drives, crashed at any point.

mod crash;
mod defences;
mod world;
