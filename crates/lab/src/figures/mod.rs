//! The figures of the papers, measured on this machine and drawn again.
//!
//! | module | what it has |
//! |---|---|
//! | [`catalogue`] | the figures: what each one asks, and what is run for it |
//! | [`block`] | a figure of ordered writes from its measured points, with the model of what to expect |
//! | [`file_system`] | a figure of the file system, or of the recovery, from its measured points |
//! | [`program`] | a figure of a program on a file system from its measured points, with the model of what to expect |
//! | [`queue`] | a figure of the commands at a drive over time |
//! | [`figure`] | a finished figure: panels, claims and the verdict |
//! | [`draw`] | a panel as SVG, for a light and a dark page |
//! | [`standing`] | where Rio stands to the other ways, over several figures |
//! | [`article`] | figures as one page of HTML |
//!
//! A figure keeps the axes of its paper. Absolute numbers cannot agree: the hardware, the network and
//! the place of the code differ. A conclusion of the paper is a ratio, so ratios are compared.

pub mod article;
pub mod block;
pub mod catalogue;
pub mod draw;
pub mod figure;
pub mod file_system;
pub mod program;
pub mod queue;
pub mod standing;
