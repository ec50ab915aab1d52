//! Programs that were made for one trap each.

use std::sync::Arc;

use crate::enumerate::prepare;
use crate::enumerate::program::Change::{self, *};
use crate::enumerate::program::Sync;
use crate::enumerate::recorder::Progress;
use crate::enumerate::script::Script;
use crate::enumerate::world::{Effort, World};

/// The stream of the main journal.
const MAIN: u16 = 0;

fn judge(world: &Arc<World>, program: impl Fn(&Script)) {
    for progress in [Progress::Lazy, Progress::Eager] {
        let script = Script::new(world, progress);
        program(&script);
        assert!(script.has_run(), "{progress:?}: there was no such wait");
        if let Err(broken) = script.judge() {
            panic!("{progress:?}: {}", broken.why);
        }
    }
}

fn thorough(program: impl Fn(&Script)) {
    judge(&World::new(Effort::THOROUGH, prepare), program);
}

#[test]
fn a_synced_file_in_a_new_directory_survives_a_cut_of_the_main_commit() {
    thorough(|script| {
        script.change(Mkdir("b/e/f")).change(New("b/e/f/g")).sync("b/e/f/g", Sync::Fsync);
        script.change(New("a/n")).sync("a/n", Sync::FsyncDir);
    });
}

#[test]
fn a_name_that_was_moved_from_is_used_again() {
    thorough(|script| {
        script.change(Rename("a/x", "b/x")).change(New("a/x")).sync("a/x", Sync::Fsync);
    });
}

#[test]
fn a_name_is_created_and_synced_twice() {
    thorough(|script| {
        script.change(New("a/n")).sync("a/n", Sync::Fsync).change(Unlink("a/n"));
        script.change(New("a/n")).sync("a/n", Sync::Fsync);
    });
}

#[test]
fn the_number_of_an_inode_is_used_again() {
    thorough(|script| {
        script.change(New("a/n")).sync("a/n", Sync::Fsync).change(Unlink("a/n"));
        script.sync("", Sync::All).change(New("a/n")).sync("a/n", Sync::Fsync);
        script.change(New("b/x")).sync("b/x", Sync::Fdatasync);
        let ids = script.ids();
        let is_reused = ids.windows(2).any(|pair| pair[0].0 == pair[1].0);
        assert!(is_reused, "{ids:?}");
    });
}

#[test]
fn files_are_synced_at_the_same_time_on_two_streams() {
    for stream in [1, 2] {
        thorough(|script| {
            let name = if stream == 1 { "a/n" } else { "a/m" };
            script.change(New("a/n")).change(New("a/m"));
            script.in_wait(stream, 0, |other| {
                other.change(New("a/o")).change(New("a/p"));
                other.sync("a/o", Sync::Fsync).sync("a/p", Sync::Fsync);
            });
            script.sync(name, Sync::Fsync);
            // One of the two is on this stream.
            script.sync("a/n", Sync::Fsync).sync("a/m", Sync::Fsync);
        });
    }
}

#[test]
fn a_file_is_synced_while_a_commit_is_in_flight() {
    for wait in 0..2 {
        thorough(|script| {
            script.change(New("a/n")).sync("a/n", Sync::Fsync).change(Write("a/x", 0, 100));
            script.change(Mkdir("a/d"));
            script.in_wait(MAIN, wait, |other| {
                other.change(New("a/d/f")).sync("a/d/f", Sync::Fsync);
                other.change(Write("a/n", 5000, 100)).sync("a/n", Sync::Fsync);
                other.sync("a/x", Sync::Fsync);
            });
            script.sync("a/n", Sync::FsyncDir);
        });
    }
}

#[test]
fn a_record_does_not_undo_a_later_change_of_a_directory_on_the_way() {
    thorough(|script| {
        script.change(Mkdir("a/n")).change(Mode("a/n", 0o700));
        script.in_wait(MAIN, 1, |other| {
            other.change(New("a/n/f")).sync("a/n/f", Sync::Fsync);
        });
        script.sync("a/n", Sync::Fsync);
    });
}

#[test]
fn an_area_comes_around_after_a_commit_in_whose_flight_a_record_was_written() {
    let world = World::new(Effort { nested: 1 << 40, ..Effort::USUAL }, prepare);
    let world = &world;
    // One of them is the last record before the end of the area.
    (124..128).for_each(|records| {
        judge(world, |script| {
            for number in 0..records {
                script.change(Write("a/x", number * 10, 10)).sync("a/x", Sync::Fsync);
            }
            script.change(New("a/n"));
            script.in_wait(MAIN, 1, |other| {
                other.change(Write("a/x", 8000, 100)).sync("a/x", Sync::Fsync);
            });
            script.sync("a/n", Sync::FsyncDir);
            for _ in 0..4 {
                script.change(Write("a/x", 7, 10)).sync("a/x", Sync::Fsync);
            }
        })
    });
}

#[test]
fn a_file_that_was_cut_and_grows_shows_zeroes() {
    thorough(|script| {
        script.change(Truncate("a/x", 100)).change(Truncate("a/x", 10_000));
        script.change(New("a/n")).sync("a/n", Sync::FsyncDir);
    });
    thorough(|script| {
        script.change(Truncate("a/x", 100)).change(Write("a/x", 20_000, 100));
        script.change(New("a/n")).sync("a/n", Sync::FsyncDir);
        script.change(Truncate("a/x", 15_000)).change(New("a/m")).sync("a/n", Sync::FsyncDir);
    });
}

#[test]
fn a_file_is_written_behind_a_barrier_of_another() {
    thorough(|script| {
        script.change(Write("a/x", 0, 100)).sync("a/x", Sync::Barrier);
        script.change(Write("b/y", 0, 100)).sync("b/y", Sync::Fsync);
        script.change(Write("a/x", 6000, 100)).sync("a/x", Sync::Barrier);
        script.change(Write("a/x", 9000, 100)).sync("a/x", Sync::Barrier);
        script.change(New("a/n")).sync("a/n", Sync::Fsync);
    });
}

#[test]
fn a_new_file_without_data_is_synced_behind_a_barrier_of_another() {
    thorough(|script| {
        script.change(New("b/x")).sync("b/x", Sync::Barrier);
        script.change(Create("a/n")).sync("a/n", Sync::Fsync);
    });
}

#[test]
fn mount_and_unmount_can_be_cut_anywhere() {
    let effort = Effort { nested: 1, ..Effort::THOROUGH };
    judge(&World::new(effort, prepare), |script| {
        script.change(New("a/n")).sync("a/n", Sync::Fsync).change(Unlink("a/x"));
        script.change(Change::Mkdir("b/x")).unmount();
    });
}
