//! `rio target drain`: a target ends when its volumes are closed.

use std::{process::Child, thread, time::Duration};

use crate::{
    reload::{HOST, OTHER, Scene},
    site::{LIMIT, finish, keys, start_in},
};

fn drain(scene: &Scene, limit: &str) -> Child {
    let words = ["target", "drain", "--control", "control", "--limit", limit, "-o", "json"];
    start_in(scene.folder.path(), &words)
}

fn limit() -> String {
    LIMIT.as_secs().to_string()
}

#[test]
fn a_target_waits_for_an_open_volume_and_takes_no_new_hosts() {
    let mut scene = Scene::new(&[1, 2], "");
    scene.volume("create", 2, &["v"]).ok();
    let (writer, pipe) = scene.start_writer();
    let draining = drain(&scene, &limit());
    scene.wait_for_message("draining: waits for volume");
    let new = finish(scene.start("show", 1, OTHER, &["w"]));
    new.failed(3, &[]);
    assert!(scene.messages().contains("being drained"), "{}", scene.messages());
    // The owner goes on, and closes the volume.
    drop(pipe);
    finish(writer).ok();
    let done = finish(draining);
    let view = done.ok();
    assert_eq!(keys(&view), "drained open_volumes schema seconds");
    assert_eq!((&view["drained"], &view["open_volumes"]), (&true.into(), &serde_json::json!([])));
    assert!(done.stderr.contains(HOST) && done.stderr.contains("s are left"), "{done:?}");
    assert_eq!(finish(scene.target.take().unwrap()).code, 0);
}

#[test]
fn a_target_without_open_volumes_ends_at_once() {
    let mut scene = Scene::new(&[1, 2], "");
    scene.volume("create", 2, &["v"]).ok();
    assert_eq!(finish(drain(&scene, &limit())).ok()["drained"], true);
    assert_eq!(finish(scene.target.take().unwrap()).code, 0);
    let words = ["target", "drain", "--control", "control", "-o", "json"];
    finish(start_in(scene.folder.path(), &words)).failed(3, &["no target at control"]);
}

#[test]
fn the_limit_ends_a_target_with_open_volumes() {
    let mut scene = Scene::new(&[1, 2], "");
    scene.volume("create", 2, &["v"]).ok();
    let (writer, pipe) = scene.start_writer();
    let first = drain(&scene, &limit());
    scene.wait_for_message("draining: waits for volume");
    // Another one with a shorter time.
    let second = drain(&scene, "0.5");
    for draining in [first, second] {
        let done = finish(draining);
        done.failed(4, &["volumes were open", HOST]);
        assert_eq!(done.json()["open_volumes"][0]["owner"], HOST);
    }
    assert_eq!(finish(scene.target.take().unwrap()).code, 4);
    drop(pipe);
    finish(writer).failed(6, &[]);
}

#[test]
fn a_client_that_leaves_ends_no_draining() {
    let mut scene = Scene::new(&[1, 2], "");
    scene.volume("create", 2, &["v"]).ok();
    let (writer, pipe) = scene.start_writer();
    let mut draining = drain(&scene, &limit());
    scene.wait_for_message("draining: waits for volume");
    draining.kill().unwrap();
    draining.wait().unwrap();
    thread::sleep(Duration::from_millis(200));
    drop(pipe);
    finish(writer).ok();
    assert_eq!(finish(scene.target.take().unwrap()).code, 0);
}
